"""How the demo model was made: corpus, tokenizer, training and evaluation."""
