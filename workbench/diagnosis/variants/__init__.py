"""What an operation may have been instead: variants, replayed on its recorded inputs and fitted to what came out."""
