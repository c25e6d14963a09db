"What a record holds and where it lies: schema, store, TensorBoard. Does not know what a task is."
