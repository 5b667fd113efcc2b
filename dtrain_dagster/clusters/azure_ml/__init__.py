"""Azure ML as a cluster: `manager` is what the rest uses; what decides (`capacity`, `states`) knows no service."""
