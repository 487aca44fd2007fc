"""The operator's view of a run: status, progress, warnings, and the copy on object storage.

progress         the progress of a run
diagnosis        finds what is wrong with it
live_view        shows both in the terminal
run_page         the page of a local run, served and as report.html (page.html)
page_data        what the page shows
stopping         the lines printed when a user stops a run, with what a stop without saving loses
status_page      the status of a process
status_command   `python main.py status`
status_summary   its first lines
role_watch       finds roles that are alive but make no progress, for the supervisor
systemd          heartbeats for systemd while a role makes progress
storage_copy     keeps the copy on object storage up to date
storage_command  `python main.py storage`
tasks_command    `python main.py tasks`
"""
