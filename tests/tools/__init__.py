"""Tools that judge the repository: imports, documents, process state, evidence; imported as `tools.*`."""
