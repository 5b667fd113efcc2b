"""`dtrain doctor`: a walk through everything that a first training on a subscription needs, before it is bought.

`lines` has the form of an answer; `access`, `buying` and `surroundings` decide, without a request; `reader` asks;
`rounds` does the walk.
"""
