"""A model timed on this engine beside other libraries, in the same run, each in processes of its own."""
