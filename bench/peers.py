"""Peers: the same ResNet-50 step by other libraries, each in a process of its own that steps when told.

`bench/resnet50.py --peers` starts them. Same architecture (v1.5), batch, precision (bfloat16 on GPUs: torch by
autocast, Keras by its policy), rows and optimizer; each in the way its manual says. With several replicas batch norm
sees a replica's rows (torch DDP, TensorFlow) or the whole batch (Keras, and torch in one process).
"""

import argparse
import multiprocessing
import os
import sys
from functools import partial

from imagenet import BLOCKS, CLASSES, FEATURES, LR, MOMENTUM, from_folder, images
from turns import Elsewhere, free_port, serve, serve_missing, timed


def need_gpu(options, has, library):
    """Where the others run on a GPU, so must this one: bfloat16 is for GPUs alone."""
    if options.half and not has:
        raise ModuleNotFoundError(f"no {library}", name=library)


# torch


def torch_net(blocks):
    import torch  # type: ignore[import]  # if installed
    from torch import nn  # type: ignore[import]

    def conv(inputs, features, size, stride=1):
        return nn.Conv2d(inputs, features, size, stride, size // 2, bias=False)

    class Block(nn.Module):  # type: ignore[misc]  # unknown where torch is not installed
        def __init__(self, inputs, features, stride, is_first):
            super().__init__()
            last = nn.BatchNorm2d(4 * features)
            nn.init.zeros_(last.weight)
            self.main = nn.Sequential(
                *(conv(inputs, features, 1), nn.BatchNorm2d(features), nn.ReLU(inplace=True)),
                *(conv(features, features, 3, stride), nn.BatchNorm2d(features), nn.ReLU(inplace=True)),
                *(conv(features, 4 * features, 1), last),
            )
            around = [conv(inputs, 4 * features, 1, stride), nn.BatchNorm2d(4 * features)]
            self.around = nn.Sequential(*(around if is_first else []))

        def forward(self, x):
            return torch.relu(self.main(x) + self.around(x))

    layers, inputs = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
    for stage, (features, count) in enumerate(zip(FEATURES, blocks, strict=False)):
        for block in range(count):
            layers.append(Block(inputs, features, 2 if stage and not block else 1, not block))
            inputs = 4 * features
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def torch_step(options, x, y, is_compiled=False, is_channels_last=False, wrap=None):
    import torch  # type: ignore[import]
    from torch.nn.functional import cross_entropy  # type: ignore[import]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    need_gpu(options, device == "cuda", "torch with CUDA")
    torch.backends.cudnn.benchmark = True  # tries convolutions out, as XLA does
    order = torch.channels_last if is_channels_last else torch.contiguous_format
    model = torch_net(options.blocks).to(device, memory_format=order)
    model = wrap(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    pixels = torch.from_numpy(x).to(device).permute(0, 3, 1, 2).contiguous(memory_format=order)
    labels = torch.from_numpy(y).long().to(device)

    def loss_of(pixels, labels):
        with torch.autocast(device, torch.bfloat16, enabled=options.half):
            logits = model(pixels.to(torch.bfloat16 if options.half else torch.float32) / 255)
        return cross_entropy(logits.float(), labels)

    loss_of = torch.compile(loss_of) if is_compiled else loss_of

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(pixels, labels)
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    return step


def serve_torch(options, **kind):
    serve(timed(torch_step(options, *rows_of(options), **kind)))


def serve_ddp(options):
    """One process a replica, with its share of the cores; the first one tells the others how many steps to run."""
    port, context = free_port(), multiprocessing.get_context("spawn")
    others = [context.Process(target=ddp, args=(options, rank, port)) for rank in range(1, options.replicas)]
    for other in others:
        other.start()
    ddp(options, 0, port)
    for other in others:
        other.join(60)


def ddp(options, rank, port):
    import torch  # type: ignore[import]
    from torch import distributed  # type: ignore[import]
    from torch.nn.parallel import DistributedDataParallel  # type: ignore[import]

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.replicas))
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.replicas)
    mine = slice(rank * options.batch // options.replicas, (rank + 1) * options.batch // options.replicas)
    steps = timed(torch_step(options, *(a[mine] for a in rows_of(options)), wrap=DistributedDataParallel))

    def told(n=0):
        count = torch.tensor(n)
        distributed.broadcast(count, 0)
        return int(count)

    if rank == 0:
        serve(lambda n: steps(told(n)))
        told(0)
    else:
        while n := told():
            steps(n)
    distributed.destroy_process_group()


# Keras and TensorFlow


def keras_net(options):
    import keras  # type: ignore[import]  # if installed
    from keras import layers  # type: ignore[import]

    if options.half:
        keras.mixed_precision.set_global_policy("mixed_bfloat16")

    def conv(x, features, size, stride=1, **norm):
        x = x if stride == 1 else layers.ZeroPadding2D(size // 2)(x)
        padding = "same" if stride == 1 else "valid"
        x = layers.Conv2D(features, size, stride, padding, use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, **norm)(x)

    image = keras.Input((options.image, options.image, 3), dtype="uint8")
    x = layers.ReLU()(conv(layers.Rescaling(1 / 255)(image), 64, 7, 2))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))  # after a ReLU, zeros change no maximum
    for stage, (features, count) in enumerate(zip(FEATURES, options.blocks, strict=False)):
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = layers.ReLU()(conv(x, features, 1))
            y = layers.ReLU()(conv(y, features, 3, stride))
            y = conv(y, 4 * features, 1, gamma_initializer="zeros")
            x = layers.ReLU()(layers.Add()([y, x if block else conv(x, 4 * features, 1, stride)]))
    return keras.Model(image, layers.Dense(CLASSES, dtype="float32")(layers.GlobalAveragePooling2D()(x)))


def serve_keras(options):
    """`train_on_batch`, which sends its rows each time."""
    os.environ["KERAS_BACKEND"] = "jax"
    from record import cpu_devices

    cpu_devices(options.replicas)
    import keras  # type: ignore[import]

    devices = keras.distribution.list_devices()[: options.replicas]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    model = keras_net(options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LR, momentum=MOMENTUM), loss)
    x, y = rows_of(options)
    serve(timed(lambda: float(model.train_on_batch(x, y))))


def serve_tensorflow(options):
    """A loop of one's own, with Keras for the network."""
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    import keras  # type: ignore[import]
    import tensorflow as tf  # type: ignore[import]  # if installed

    gpus = tf.config.list_physical_devices("GPU")
    need_gpu(options, gpus, "TensorFlow with CUDA")
    if not gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.replicas)
    devices = [f"{'GPU' if gpus else 'CPU'}:{rank}" for rank in range(options.replicas)]
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        model, optimizer = keras_net(options), keras.optimizers.SGD(LR, momentum=MOMENTUM)
        optimizer.build(model.trainable_variables)
    x, y = (tf.split(a, options.replicas) for a in rows_of(options))
    rows = [
        strategy.experimental_distribute_values_from_function(lambda c, a=a: a[c.replica_id_in_sync_group])
        for a in (x, y)
    ]

    def one(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses)
            part = loss / options.replicas  # gradients are summed
        gradients = tape.gradient(part, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[misc]  # untyped
    def step(x, y):
        return strategy.reduce("MEAN", strategy.run(one, (x, y)), axis=None)

    serve(timed(lambda: float(step(*rows))))


# Starting them

PEERS = {
    "keras": ("Keras 3 DataParallel, JAX", serve_keras),
    "torch": ("torch, eager", serve_torch),
    "torch-channels-last": ("torch, eager, channels_last", partial(serve_torch, is_channels_last=True)),
    "torch-compile": ("torch.compile, channels_last", partial(serve_torch, is_compiled=True, is_channels_last=True)),
    "torch-ddp": ("torch DDP, gloo, a process each", serve_ddp),
    "tensorflow": ("TensorFlow MirroredStrategy", serve_tensorflow),
}


def usual(replicas):
    """Those that make sense here: torch's compiler on GPUs, its processes on CPUs."""
    import jax

    is_cpu = jax.devices()[0].platform == "cpu"
    apart = {"torch-channels-last", "torch-compile"} if is_cpu else {"torch-ddp"}
    return [name for name in PEERS if name not in apart and (name != "torch-ddp" or replicas > 1)]


def start(names, replicas, batch, *, image, blocks, half, folder=None):
    """The peers named, or the usual ones, each in a process that is ready to step; by what they are called."""
    found = {}
    for name in names.split(",") if names else usual(replicas):
        command = [sys.executable, __file__, name, "--replicas", replicas, "--batch", batch, "--image", image]
        command += ["--blocks", ",".join(map(str, blocks)), *(["--half"] if half else [])]
        command += ["--folder", folder] if folder else []
        peer = Elsewhere(command, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        if peer.is_ready():
            found[PEERS[name][0]] = peer
            print(f"  {replicas} replica(s), {batch} images: {PEERS[name][0]} is ready", flush=True)
        else:
            reason = f"{peer.about['missing']} is not installed" if "missing" in peer.about else peer.about["failed"]
            print(f"  {PEERS[name][0]} is left out: {reason}", flush=True)
    return found


def rows_of(options):
    """One batch: the first rows of what synk is given."""
    if options.folder:
        x, y = from_folder(options.folder)
    else:
        x, y = images(2 * options.batch, options.image)
    return x[: options.batch].copy(), y[: options.batch].copy()


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--blocks", default=BLOCKS, type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--folder")
    options = parser.parse_args()
    try:
        PEERS[options.peer][1](options)
    except ModuleNotFoundError as error:
        serve_missing(error.name)


if __name__ == "__main__":
    main()
