"""One plug-in of each seam, each in a file of its own; a config names it by its import path."""
