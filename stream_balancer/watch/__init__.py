"""A live picture of a running balancer, for another process of the same user on the same machine.

    status      what a picture holds, and its line of JSON; where balancers that publish are found
    publish     the balancer's side: a Unix socket in a private folder, and nothing to do while nobody looks
    view        a picture as text on a terminal

``stream-balancer watch`` puts them together. What may not enter: anything that a balancer would wait for.
"""
