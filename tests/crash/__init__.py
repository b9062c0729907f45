"""The program of `scripts/crash`: real servers that are killed under load, and what must be there afterwards.

`rows` makes bytes that say what they are, `wire` talks to the server, `model` knows what a client was told, `steps` are
the commands with what each means for the model, `plans` choose them, `verify` compares a server with a model, `fleet`
is the clients, `cycles` starts and kills servers. `scripts/crash --help` and `tests/e2e/test_crash.py` run it.
"""
