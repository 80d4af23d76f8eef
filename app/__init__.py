"""The console: the window, its Qt-free middle (`net`, `lab`, `store`) and the headless commands.

No torch here and no import of `engine`: the console knows the engine only through `ipc`.
"""

__version__ = "0.1.0"
