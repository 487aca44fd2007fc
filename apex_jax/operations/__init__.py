"""The operator's view of a run: status, progress, warnings, and the copy on object storage.

progress         the progress of a run
diagnosis        finds problems of a run
live_view        shows progress and problems in the terminal
run_page         the page of a local run, served and as report.html (page.html)
page_data        the data of that page
fleet_page       the page of a fleet: `python main.py status --page`
process_report   the report of this process: in its run directory, at its address, and heartbeats for systemd
records          what a report holds, and how it is read
stopping         the lines printed when a user stops a run
status_command   `python main.py status`
check_command    `python main.py check`
role_watch       finds roles that are alive but make no progress, for the supervisor
storage_copy     keeps the copy on object storage up to date; `python main.py storage`
tasks_command    `python main.py tasks`
"""
