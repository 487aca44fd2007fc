"""The operator's view of a run: status, progress, warnings, and the copy on object storage.

progress         the progress of a run
diagnosis        finds problems of a run
live_view        shows progress and problems in the terminal
pages            the page of a local run, served and as report.html (page.html), and that of a fleet
process_report   the report of this process: in its run directory, at its address, and heartbeats for systemd
records          what a report holds, how it is read, and how a supervisor finds roles without progress
status_command   `python main.py status`
check_command    `python main.py check`
storage_copy     keeps the copy on object storage up to date; `python main.py storage`
tasks_command    `python main.py tasks`
"""
