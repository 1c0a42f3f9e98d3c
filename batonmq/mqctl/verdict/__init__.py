"""The verdict: what broke, what is safe and how that is known, and what each repair would cost.

`files` and `ask` gather `evidence`, each source within a limit of time. `incidents` names what
happened, `safety` what is lost and which process may be restarted: both are pure.
"""
