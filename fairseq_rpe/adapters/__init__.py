"""Use the encodings in models of other packages; each module needs the package that it is named after."""
