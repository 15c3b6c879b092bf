import importlib

tune = importlib.import_module("stream_balancer.tools.tune")  # sb.tune is the function
tune.LEAST_BATCHES = 50
tune.PARTITION_TOLERANCE = 0.05
pass  # the snippet: generate_trace(800 -> generate_trace(200
