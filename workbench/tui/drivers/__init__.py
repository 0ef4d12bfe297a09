"""What runs the commands of the workbench: a host with a running model, or a debugger on a recording."""
