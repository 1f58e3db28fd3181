"""How values follow the batch: dims that hold it, ops that mix it, captures at two sizes compared."""
