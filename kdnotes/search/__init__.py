"Search for settings: handed a callable, it does not know what a trial trains."
