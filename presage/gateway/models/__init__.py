"""Which model of a pool serves a request: the router, in a process of its own, and the choice by it."""
