"The commands of `kdnotes`, thin over the library."
