"""Where it runs: one adapter a file; what each adds to the lifecycles stands in a monitor."""
