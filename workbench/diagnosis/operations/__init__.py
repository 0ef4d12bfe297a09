"""Every operation of a recording, judged on its own recorded inputs with the checkpoint's weights."""
