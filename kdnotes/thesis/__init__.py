"The written report from committed evidence. Runs nothing."
