"""What runs inside other people's engines: these files import torch, the standard library and each other only."""
