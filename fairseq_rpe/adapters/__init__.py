"""Other packages' models with the encodings of this one; each file needs the package that it is named after."""
