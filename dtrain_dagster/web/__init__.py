"""How pages are served, this project's and Dagster's: sockets, the guard in front of them, secrets that pages hide.

What a page shows belongs to who makes it, such as `dashboard`.
"""
