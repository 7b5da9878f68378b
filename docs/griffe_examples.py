"""For the site: docstrings say "Example:", and griffe calls the section of doctests "Examples:"."""

import griffe


class Examples(griffe.Extension):
    """Renames the section, before docstrings are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
