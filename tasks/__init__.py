"""
What evaluate.py measures. To add a task, write a file here that has a Task (tasks/common.py), and a
row below.
"""
from tasks import (edit, image, importance, infill, l2t, molecule, nelbo, orders, protein, sts, t2l,
                   text, unconditional)

TASKS = {
    'nelbo': nelbo.TASK,
    'l2t': l2t.TASK,
    't2l': t2l.TASK,
    'unconditional': unconditional.TASK,
    'text': text.TASK,
    'infill': infill.TASK,
    'edit': edit.TASK,
    'orders': orders.TASK,
    'sts': sts.TASK,
    'importance': importance.TASK,
    'image': image.TASK,
    'molecule': molecule.TASK,
    'protein': protein.TASK,
}
