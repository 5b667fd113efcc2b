"""Azure ML as a cluster: `manager` is what the rest uses; what decides (`sku_chain`, `states`) knows no service.

Only `client`, `jobs`, `provision` and `pools` speak with the service. Models and endpoints of a workspace belong to
`dtrain_dagster.registry`.
"""
