"""`python -m dtrain_dagster setup`, `work COMMAND` and `clean`: see `dtrain_dagster.cli.home`."""

from dtrain_dagster.cli.home import main

main(prog_name="python -m dtrain_dagster")
