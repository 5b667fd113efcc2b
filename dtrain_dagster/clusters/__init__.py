"""Clusters on which jobs run: the common interface (`base`), the rules that all share, and one folder for each kind.

Modules here serve every kind of cluster; what only one kind needs belongs in its folder. The cost of a node belongs in
`costs`, and the content of a job in `jobs`.
"""
