"""For the site: adapt what griffe reads from docstrings and signatures."""

import griffe


class Examples(griffe.Extension):
    """Rename the section "Example:" to griffe's "Examples:", and hide what tells readers nothing."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        if isinstance(obj, griffe.Function):
            if "removed" in obj.parameters:
                del obj.parameters["removed"]
            if str(obj.returns) == "Any":  # the sentence under "Returns:" says more
                obj.returns = None
