"""The client: producer, consumers and admin over one shared `ClientInstance`.

Applications import its public names from `batonmq`.
"""
