"""An mmCIF file beside its format's dictionaries, by gemmi: `python -m tests.support.dictionaries FILE.cif DIC...`.

The dictionaries count as one: PDBx's is mmcif_pdbx_v50.dic of github.com/wwpdb-dictionaries/mmcif_pdbx, ModelCIF's part
mmcif_ma_ext.dic of github.com/ihmwg/ModelCIF; neither comes with a package of Python's. The exit code is 1 where the
file has something otherwise than they allow.
"""

import sys
from pathlib import Path

import gemmi


def notes(file: Path, dictionaries: list[Path]) -> list[str]:
    """What a file has otherwise than dictionaries allow."""
    found: list[str] = []
    ddl = gemmi.cif.Ddl(logger=lambda line: found.append(line), use_context=False)
    for dictionary in dictionaries:
        ddl.read_ddl(gemmi.cif.read_string(dictionary.read_text(encoding="utf-8", errors="replace")))
    found.clear()  # notes of the dictionaries' own
    ddl.validate_cif(gemmi.cif.read(str(file)))
    return found


def main(argv: list[str]) -> int:
    file, *dictionaries = map(Path, argv)
    found = notes(file, dictionaries)
    print(f"{file}: {len(found)} notes", *found, sep="\n    ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
