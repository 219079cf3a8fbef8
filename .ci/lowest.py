"""The oldest version of each requirement that pyproject.toml allows, as constraints for pip.

    python .ci/lowest.py EXTRA... >lowest.txt

Extras that it names bring theirs.
"""

import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
wanted = list(project["dependencies"])
left = sys.argv[1:]
while left:
    for requirement in extras[left.pop()]:
        own = re.fullmatch(r"saev-store\[(.*)\]", requirement)
        left += own[1].split(",") if own else []
        wanted += [] if own else [requirement]
for requirement in wanted:
    print(re.sub(r"\[.*?\]", "", requirement).replace(">=", "=="))
