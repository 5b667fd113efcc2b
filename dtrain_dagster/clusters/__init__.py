"""Where jobs run: the interface of all clusters (`base`), what they decide alike, and one folder for each kind.

Modules here serve every kind of cluster; what only one kind needs belongs to its folder. What a node costs belongs to
`costs`, and what a job is to `jobs`.
"""
