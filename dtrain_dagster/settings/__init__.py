"""The project's settings from the environment (`environment`, `azure`), and the folder that it writes (`home`).

Settings of a training belong to `trainer.config`.
"""
