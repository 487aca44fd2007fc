"""The machine, and this program on it.

errors           the errors that users see, one line each
program          how this program was started: from a checkout, or installed; the argument parser of every command
disk             regular files only, atomic and durable writes, and locks on directories
machine          the cores, memory and threads that a process may use, and whether its packages were tried
compiled         the decorator that compiles numeric loops
user_code        code of the user that a setting names: its import, and its errors in one line
output           keeps the program running if standard output or error fails
"""
