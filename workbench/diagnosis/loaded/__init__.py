"""What an engine has really loaded: the weights in the memory of each rank against the checkpoint, by content."""
