from tests.snippets._stage import *


class Log(list):
    def log(self, figures, step):
        self.extend(figures)

    def add_scalar(self, name, value, step):
        self.append(name)


wandb, writer = Log(), Log()


class batch:
    step = 1


async def main():
    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=2)) as balancer:
        pass  # the snippet


anyio.run(main)
assert wandb
assert list(wandb) == list(writer)
