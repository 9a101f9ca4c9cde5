"""Trains well; when it evaluates, one hospital's app says more than was declared, and another's fails."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
    hospital = int(context.node_config["hospital"])
    trained = {name: (array + hospital).astype(array.dtype) for name, array in arrays.items()}
    records = RecordDict(
        {
            "arrays": ArrayRecord({name: _array(array) for name, array in trained.items()}),
            "metrics": MetricRecord({"num-examples": 10 * hospital, "train_loss": 0.5}),
        }
    )
    return Message(content=records, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    if int(context.node_config["hospital"]) == 2:
        raise ValueError("no such file: /images/patient-4711.dcm")
    metrics = {"num-examples": 7, "eval_acc": 0.75, "oldest-patient": 101}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def _array(array: np.ndarray):
    from flwr.app import Array

    return Array(array)
