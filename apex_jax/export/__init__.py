"""A trained policy as files that others can use: `python main.py export RUN FOLDER`."""
