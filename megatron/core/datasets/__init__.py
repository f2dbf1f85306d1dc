"""Token files and the datasets over them: which tokens training sample i holds, as a function of i
alone.
"""
