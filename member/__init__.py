"""The frame of a pool member: process, servers, threads, Watch and Check."""
