"""Tools for agents over the Model Context Protocol: the debugger and the library behind eight calls."""
