"""Azure ML as a cluster: `manager` is its interface; the modules that decide (`sku_chain`, `states`) know no service.

Only `client`, `jobs`, `provision` and `pools` speak with the service. Models and endpoints of a workspace belong in
`dtrain_dagster.registry`.
"""
