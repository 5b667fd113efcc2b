"""Where searches are kept, for those who need nothing else of them."""

FOLDER = "searches"
"""The folder of a home with a folder for each search."""
