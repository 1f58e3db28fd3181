"""The planner's part of the command line.

Begin at `cli`: the commands plan, search, groups, schedule and schema. `command_group` has the classes of typer that
print each error as one message.
"""
