"""Numbers and words as every part of the workbench writes them."""
