"""Scenarios as text: verbs, and under each what it caused.

A line `> verb arg ...` calls `env.do_verb(arg, ...)`. What that appends to `env.out` stands under
the line, indented. A line `# ...` is a comment, an empty line is layout. `pytest --rewrite` writes
the outcome into the files; the diff is then to be read. Origin: etcd-io/raft, interaction_test.go.
"""

from typing import Any


def play(text: str, env: Any) -> str:
    """The script with the outcome of each verb under it."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#", ">")):
            before = lines[-1] if lines else "#"
            if before.startswith(" ") or (line.startswith("#") and before.startswith(">")):
                lines.append("")
            lines.append(line)
        if line.startswith(">"):
            verb, *args = line[1:].split()
            getattr(env, f"do_{verb}")(*args)
            lines += [f"  {said}" for said in env.out]
            env.out = []
    return "\n".join(lines) + "\n"
