"""Count words of many files: every rank maps its share, one reduces, and a bar shows how far it is.

python scripts/examples/word_count.py FOLDER
asyncpar launch --nproc-per-node 4 scripts/examples/word_count.py FOLDER
"""

import asyncio
import re
import sys
from collections import Counter
from pathlib import Path

import asyncpar as ap


def count(path: Path) -> Counter[str]:
    return Counter(re.findall(r"[a-z]{3,}", path.read_text(errors="replace").lower()))


async def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("word_count: expected a folder: python word_count.py FOLDER")
    files = sorted(Path(sys.argv[1]).rglob("*.py"))
    if not files:
        sys.exit(f"word_count: there is no file *.py in {sys.argv[1]}")
    async with ap.init() as node:
        words = Counter[str]()
        mine = files[node.rank :: node.size]
        with ap.progress("count", total=max(1, len(mine))) as bar:
            for path in mine:
                words += await asyncio.to_thread(count, path)  # the node's loop stays free meanwhile
                bar.advance(words=len(words))
        counts = await node.world.gather_object(dict(words), root=0)  # map is done, reduce:
        if counts is not None:
            total = sum((Counter(each) for each in counts), Counter[str]())
            print(f"{len(files)} files, {total.total()} words, {node.size} rank(s)")
            print(", ".join(f"{word} {number}" for word, number in total.most_common(5)))


ap.run(main)
