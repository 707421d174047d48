"""What an answer must look like: from `response_format` and `tool_choice` to a `core.constraint.Constraint`.

`form` reads what a client asks for, `limits` refuses what would take too long to follow, `compiler` makes a grammar of
it beside the event loop, `state` walks through that, token by token. The grammars are llguidance's, which is imported
with the first of them; `messages` says in our words what it finds wrong.
"""
