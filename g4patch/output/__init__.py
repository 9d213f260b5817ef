"""One renderer a module: a report in, something to print out."""
