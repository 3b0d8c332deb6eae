"""``--add-data-source-prefix-tags`` of branch ``nllb``: three names in each dictionary.

NLLB-200's published models have rows for them after those of the languages.
"""

from typing import Any

FLAG = "--add-data-source-prefix-tags"
TAGS = ("<MINED_DATA>", "<MMT_BT_DATA>", "<SMT_BT_DATA>")
HELP = "add the names of NLLB's data sources to the dictionary, after the languages"
TASK = "translation_multi_simple_epoch"
KEY = FLAG[2:].replace("-", "_")


def prepare(original, load_dictionary, args, **options):
    """Replace ``MultilingualDatasetManager.prepare``: append the names if the flag is given."""
    languages, dictionaries, training = original(load_dictionary, args, **options)
    if getattr(args, KEY, False):
        for dictionary in {id(each): each for each in dictionaries.values()}.values():
            if listed := [tag for tag in TAGS if tag in dictionary]:
                raise ValueError(
                    f"{', '.join(listed)} is in the dictionary's file, before the languages: "
                    f"remove the line, because {FLAG} adds it after them"
                )
            for tag in TAGS:
                dictionary.add_symbol(tag)
    return languages, dictionaries, training


def refuse_without_flag(trained: Any, task: Any) -> None:
    """Raise ValueError if a model was trained with the flag and the program's task lacks it."""
    args = getattr(task, "args", None)
    if getattr(trained, KEY, False) and args is not None and not getattr(args, KEY, False):
        raise ValueError(f"the model was trained with {FLAG}: give it, or language tokens move")


def other_dictionary(rows: int, symbols: int) -> str:
    """Return the error for weights of ``rows`` symbols and a dictionary of other length."""
    text = (
        f"the checkpoint is of a dictionary of {rows:,} symbols, and this one has {symbols:,}: "
        "give the data folder (dict.txt) and the languages that the model was trained on"
    )
    return f"{text}, or {FLAG}" if rows - symbols == len(TAGS) else text
